// Package ramp measures the load of a backend and its frontends over time, while clients open connections at a growing
// rate and an offload starts at a threshold (Nezha §6.2; NZ5). The nodes are those of a lab with the real daemons. Load
// is the run time of a node's programs: all nodes share the CPUs of this machine, so nothing else tells them apart.
package ramp
