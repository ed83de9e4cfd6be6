"""A rival of `towerctl bench switch`: slot files behind a proxy."""
