"""Training and judging predictors of agent workflows; `towerd/policy/predict` runs them."""
