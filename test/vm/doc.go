// Command vm runs a command on another kernel than this machine's: in a virtual machine that sees this
// machine's files, read-only beneath a layer of its own that ends with it. It prints what the command
// prints and exits as it does. Made for
//
//	go test -exec 'vm -kernel FOLDER' ./internal/datapath
//
// by which `make vm` runs tests on Debian's kernels. It needs no KVM, no root and no network.
//
// The same program is the machine's first process (guest.go).
package main
