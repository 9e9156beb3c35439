// Package nodeprobe probes the kernels of nodes by ICMPv6 echo: a dead node does not answer, one whose agent is dead
// does. The announcer withdraws routes by nodes that do not answer, and the endpoints of services on them get no new
// connections.
package nodeprobe
