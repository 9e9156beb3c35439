// Package host is the node as the data path sees it: its network namespace, sysctls, tc filters, the bpffs with the
// pins, and the names of devices. It has no state of containers.
package host
