// SIGKILL at random instants.
