// Command pilaster-cni is the CNI plugin: it passes what a container runtime wants on to the
// agent of this node.
package main

import (
	"syscall"

	"pilaster.io/pilaster/internal/plugin"
)

func main() {
	stdout, stderr, exit := plugin.Run(syscall.Environ(), func() ([]byte, error) { return plugin.Read(syscall.Stdin) })
	if plugin.Write(syscall.Stdout, []byte(stdout)) != nil || plugin.Write(syscall.Stderr, []byte(stderr)) != nil {
		exit = 1
	}
	syscall.Exit(exit)
}
