"""The laboratory, which no daemon imports: replays, baseline policies, training, studies.

It lies in a checkout of the repository, beside the package, and is not installed with it.
`towerctl lab` finds it. Its modules may import all of towerd; towerd imports none of them.
"""
