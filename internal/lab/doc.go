// Package lab creates a Pilaster cluster of network namespaces on one machine: a fabric of routed links, the real
// orchestrator and agents as processes, and containers attached by the real CNI plugin. Tests, benchmarks, the demo and
// `pilaster lab` use it.
//
// All files of a lab are in one folder, Options.Root/<name>. One supervisor process for each lab starts its daemons and
// restarts those that end. The package finds a lab's processes in the kernel's state, not in a file: the supervisor
// holds the lab's lock, and all other processes are in the lab's namespaces. So Down also works after a crash. Commands
// may run concurrently: each command changes the state in lab.json under a lock on the folder.
package lab
