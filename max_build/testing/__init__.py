"""For the tests of others: contracts of stores and compilers, and what the pytest plugin has."""
