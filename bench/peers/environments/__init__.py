"""One small adapter for each contender of the environments' benchmark, and the loop that measures in its process.

All but `ours` run in virtual environments of their own and import nothing of this project. Their file names are not
those of the packages that they call: a script's folder comes first on Python's path.
"""
