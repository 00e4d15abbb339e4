"""What every actor shares: messages, handles, errors, the actor base, pools and models."""
