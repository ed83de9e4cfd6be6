"""The HTTP API: llama-server's endpoints and towerd's own, over one `ApiService`."""
