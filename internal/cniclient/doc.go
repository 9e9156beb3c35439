// Package cniclient is the CNI plugin that a container runtime starts for each CNI verb. It sends the environment and
// the configuration to the node's agent, where package cniserver handles them, and prints the response.
//
// Most of the plugin's time is the start of Go's runtime. Where possible (see cmd/pilaster-cni), it therefore runs
// without that runtime. Code in this package must not need it: no memory besides a Call, no goroutines, no maps, and no
// variables that are initialized when a program starts, such as those with errors.New.
package cniclient
