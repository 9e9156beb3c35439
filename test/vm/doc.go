// Command vm runs a command on another kernel: in a virtual machine that has this machine's files, read-only below a
// temporary overlay. It prints the command's output and exits with the command's status. It is meant for
//
//	go test -exec 'vm -kernel FOLDER' ./internal/datapath
//
// with which `make vm` runs tests on Debian's kernels. It needs no KVM, no root and no network.
//
// The same program is the first process of the virtual machine (guest.go).
package main
