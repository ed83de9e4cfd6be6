"""One question to Open WebUI, as its page asks it: started, told of a tool, waited for, stopped.

    python open_webui_session.py QUESTION

The chat is begun in the working folder, or continued if one was begun there."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
import uuid
from pathlib import Path
from typing import Any

START_S_MAX, REPLY_S_MAX = 240, 40
POLL_S = 0.2
CHAT, LOG = Path("chat.json"), Path("open-webui.log")
QUIET = {"OFFLINE_MODE": "true", "HF_HUB_OFFLINE": "1", "ENABLE_OLLAMA_API": "False"}
"""Nothing is fetched from elsewhere."""
TOOL = '''class Tools:
    def read_notes(self, name: str) -> str:
        """Reads a file of notes.
        :param name: The file.
        """
        return open(name).read()
'''


class Server:
    """`open-webui serve` on a free port, with its data in the working folder."""

    def __init__(self) -> None:
        with socket.socket() as taken:
            taken.bind(("127.0.0.1", 0))
            port = taken.getsockname()[1]
        self._url = f"http://127.0.0.1:{port}"
        self._token = ""
        command = ("open-webui", "serve", "--host", "127.0.0.1", "--port", str(port))
        env = os.environ | QUIET | {"DATA_DIR": str(Path("data").resolve())}
        with LOG.open("a") as log:
            self._process = subprocess.Popen(command, env=env, stdout=log, stderr=log)

    def sign_in(self) -> None:
        """Wait until it serves, and take its only user's token."""
        deadline = time.monotonic() + START_S_MAX
        while not self._token:
            try:
                self._token = self.call("/api/v1/auths/signin", {"email": "", "password": ""})[
                    "token"
                ]
            except (urllib.error.URLError, ConnectionError):
                if time.monotonic() > deadline or self._process.poll() is not None:
                    raise
                time.sleep(POLL_S)

    def call(self, path: str, body: Any = None) -> Any:
        """The JSON of a GET, or of a POST if there is a body."""
        headers = {"Content-Type": "application/json", "Authorization": f"Bearer {self._token}"}
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self._url + path, data, headers)
        with urllib.request.urlopen(request, timeout=REPLY_S_MAX) as reply:
            return json.load(reply)

    def stop(self) -> None:
        self._process.terminate()
        self._process.wait(REPLY_S_MAX)


def ask(server: Server, question: str) -> str:
    """The reply's text, or the error that the page shows."""
    chat = json.loads(CHAT.read_text()) if CHAT.exists() else {}
    model = server.call("/api/models")["data"][0]["id"]
    if not chat:
        meta = {"description": "Reads notes."}
        tool = {"id": "notes", "name": "Notes", "content": TOOL, "meta": meta}
        server.call("/api/v1/tools/create", tool)
    parent = chat.get("reply")
    user = {"id": str(uuid.uuid4()), "role": "user", "content": question, "models": [model]}
    chat["reply"] = str(uuid.uuid4())
    body = {
        "model": model,
        "stream": True,
        "messages": [{"role": "user", "content": question}],
        "tool_ids": ["notes"],
        "params": {"function_calling": "native"},
        "session_id": "page",
        "id": chat["reply"],
        "parent_id": parent,
        "user_message": user | {"parentId": parent, "childrenIds": []},
        "background_tasks": dict.fromkeys(
            ("title_generation", "tags_generation", "follow_up_generation"), parent is None
        ),
    }
    if parent:
        body["chat_id"] = chat["id"]
    chat["id"] = server.call("/api/chat/completions", body)["chat_id"]
    CHAT.write_text(json.dumps(chat))
    return wait(server, chat["id"], chat["reply"])


def wait(server: Server, chat: str, reply: str) -> str:
    """Until a reply is done and nothing runs for its chat any more."""
    deadline = time.monotonic() + REPLY_S_MAX
    while time.monotonic() < deadline:
        running = server.call(f"/api/tasks/chat/{chat}")["task_ids"]
        messages = server.call(f"/api/v1/chats/{chat}")["chat"]["history"]["messages"]
        message = messages.get(reply, {})
        if not running and (message.get("done") or message.get("error")):
            return f"{message.get('content', '')}\n{message.get('error') or ''}"
        time.sleep(POLL_S)
    return f"no reply within {REPLY_S_MAX} s"


def main() -> None:
    server = Server()
    try:
        server.sign_in()
        print(ask(server, sys.argv[1]))
    finally:
        server.stop()


if __name__ == "__main__":
    main()
