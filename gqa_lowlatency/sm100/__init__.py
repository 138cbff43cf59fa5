"""The decode kernel of Blackwell (sm_100a)."""
