"""`towerctl bench vllm`, and the engine process that it and the tests of the connector talk with."""
