"""Training and evaluation of predictors of agent workflows; `towerd/policy/predict` runs them."""
