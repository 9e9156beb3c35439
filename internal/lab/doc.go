// Package lab creates a Pilaster cluster of network namespaces on one machine: a fabric of routed links, the real
// orchestrator and agents as processes, and containers attached by the real CNI plugin. Tests, benchmarks, the demo and
// `pilaster lab` use it.
//
// All files of a lab are in one folder, Options.Root/<name>. One supervisor process for each lab starts its daemons and
// restarts those that end. The kernel's state, not a file, decides what belongs to a lab: the supervisor is the process
// that holds the lab's lock, and other processes are those in the lab's namespaces. So Down works equally after a
// crash. Commands may run concurrently: each modifies the current state under a lock on the folder.
package lab
