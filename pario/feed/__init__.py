"""How a rank gets the records of a step: one contract, several sources, and the module that chooses one."""
