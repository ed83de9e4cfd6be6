"""`towerctl bench workflows`: agents that work together, in a daemon with room for a tenth of what they use."""
