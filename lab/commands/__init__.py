"""Commands of `towerctl lab`."""
