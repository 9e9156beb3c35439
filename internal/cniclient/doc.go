// Package cniclient is all that a container runtime starts for each verb of CNI: it passes the environment and the
// configuration to the agent of the node and prints what that answers. Package cni, in the agent, does the rest.
//
// Starting costs more than running, and Go's runtime is most of the start. So the program does without it where it can
// (cmd/pilaster-cni), and nothing here may need it: no memory but that of a Call, no goroutine, no map, no variable
// that is set when a program begins, as those of errors.New are.
package cniclient
