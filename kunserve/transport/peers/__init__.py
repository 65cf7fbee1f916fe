"""Words between the instances of one group, over sockets or shared rings."""
