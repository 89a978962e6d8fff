"""The former place of train/families/, for tables of families that were written then."""
