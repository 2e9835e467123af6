"""For the tests of others: the contract of a store, and what the pytest plugin hands out."""
