// Package cniclient is the CNI plugin that a container runtime starts for each CNI verb. It sends the environment and
// the configuration to the node's agent, where package cniserver handles them, and prints the response.
//
// The start of Go's runtime would take most of the plugin's time. So, where possible (see cmd/pilaster-cni), the plugin
// runs without the runtime. Code in this package must not need the runtime: no memory besides a Call, no goroutines, no
// maps, and no variables that are initialized when a program starts, such as those with errors.New.
package cniclient
