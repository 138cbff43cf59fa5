"""The Blackwell (sm_100a) attention kernel."""
