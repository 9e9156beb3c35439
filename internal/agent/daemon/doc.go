// Package daemon runs the agent: it opens the state on disk, the data path and the networks, connects core, control and
// api, and starts and ends their background tasks. It also finds what an agent that does not run has left on disk.
package daemon
