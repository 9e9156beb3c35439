// Package lab makes a Pilaster cluster out of network namespaces on one machine: a fabric of
// routed links, the real orchestrator and agents as processes, and containers attached by the
// real CNI plugin. It is the bed of tests, benchmarks and the demo, and of `pilaster lab`.
//
// Everything of a lab lies in one folder, Options.Root/<name>. One supervisor process a lab starts
// its daemons and restarts those that die. What belongs to a lab is recognised by the kernel, not
// by what a file claims: the supervisor by the lock it holds, everything else by the namespace it
// is in. So Down cleans up after a crash exactly as it does after a quiet end. Commands may run at
// the same time: each alters what the others have written, under a lock on the folder.
package lab
