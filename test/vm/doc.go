// Command vm runs a command on another kernel than this machine's: in a virtual machine with this machine's files,
// read-only below a temporary overlay. It prints the command's output and exits with its status. It is meant for
//
//	go test -exec 'vm -kernel FOLDER' ./internal/datapath
//
// with which `make vm` runs tests on Debian's kernels. It needs no KVM, no root and no network.
//
// The same program is the first process of the virtual machine (guest.go).
package main
