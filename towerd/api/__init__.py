"""The HTTP surface: llama-server's endpoints and towerd's own, over one `Service`."""
