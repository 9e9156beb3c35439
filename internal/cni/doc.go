// Package cni is the protocol side of the CNI plugin (spec 1.1.0 and 1.0.0): it reads what a
// runtime says, asks the agent on its unix socket, and answers as the spec wants it. It decides
// nothing itself and touches no kernel object.
package cni
