// Package flannel tests pilaster accelerate beside the real Flannel: its daemon, and the CNI plugins bridge and
// host-local, which it uses for containers. Nodes are network namespaces on a switch; an etcd in the test's process has
// the leases of Flannel's subnets. The programs are built from the module in the folder binaries.
//
// The tests have the build tag flannel, because they download and build these programs: `make flannel` runs them.
package flannel
