// Command pilaster-cni is the CNI plugin. It forwards the requests of a container runtime to the agent of this node.
package main

import (
	"syscall"

	"pilaster.io/pilaster/internal/cniclient"
)

var call cniclient.Call

func main() {
	for _, v := range syscall.Environ() {
		call.Variable(v)
	}
	// Not RawSyscall6, because Go's scheduler would interrupt a blocked raw system call again and again.
	call.Kernel = syscall.Syscall6
	syscall.Exit(run())
}

func run() int {
	stdout, stderr, exit := call.Run(syscall.Stdin)
	if !call.Write(syscall.Stdout, stdout) || !call.Write(syscall.Stderr, stderr) {
		exit = 1
	}
	return exit
}
