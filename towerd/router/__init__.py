"""Several models in one daemon: a router in front, and a process for every model that is loaded.

The router listens, checks keys, and passes every request on to the process of the model that it
names, which it starts when that is needed and ends when another model needs the room. Why
processes: a crash of llama.cpp in one model takes no other model's answers, each has an interpreter
lock of its own, and what a model used is given back whole when it is unloaded.

Everything here runs on the event loop of the router; nothing is locked.
"""
