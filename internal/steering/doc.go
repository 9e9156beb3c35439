// Package steering sets and restores RPS and RFS of the kernel at three levels: the uplink (host), VXLAN devices
// (overlay) and the devices inside containers. The settings are those of the kernel's
// Documentation/networking/scaling.rst. What was set before is in one record per machine, and Reset restores it.
//
// The package does not choose between packets: the kernel does, by the hash of a packet's flow.
package steering
