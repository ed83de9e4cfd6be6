"""Keys of the router's application."""

from __future__ import annotations

from aiohttp import web

from towerd.router.http.conversations import Conversations
from towerd.router.loading.launcher import Launcher
from towerd.router.loading.models import Models
from towerd.settings.model_tables import ModelTables

LAUNCHER = web.AppKey("launcher", Launcher)
MODELS = web.AppKey("models", Models)
TABLES = web.AppKey("tables", ModelTables)
CONVERSATIONS = web.AppKey("conversations", Conversations)
