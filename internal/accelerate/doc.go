// Package accelerate is the daemon of `pilaster accelerate`: it turns on the cache of package oncache beside the VXLAN
// overlay of another network, such as Flannel's or Calico's. It finds the overlay's parameters and containers by
// netlink, evicts what a change concerns, pauses the cache while the overlay's verdicts are no function of a flow, and
// renews the lease on which the programs use the cache. Without the daemon, the overlay works alone.
//
// One goroutine, the loop of Run, owns the state. Calls of the socket run there. What may take long, because the kernel
// waits for others, is done beside it: programs are attached and detached, devices are looked at, rules are read.
package accelerate
