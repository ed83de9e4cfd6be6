"""Transform coding of stored attention state: rows in a tenth of their bytes, approximately.

`basis` is what is learned from rows of one row identity, `learn` learns it, `coded` writes rows with it and
reads them.
"""
