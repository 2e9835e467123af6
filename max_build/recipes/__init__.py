"""What a unit was derived from: noted as it is derived, held against the machine later."""
