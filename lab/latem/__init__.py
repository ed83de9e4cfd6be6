"""LATEM's algorithm beside the optimum, on small instances that can be solved exactly."""
