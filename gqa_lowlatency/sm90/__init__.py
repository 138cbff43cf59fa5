"""The decode kernel of Hopper (sm_90a)."""
