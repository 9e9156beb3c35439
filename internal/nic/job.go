package nic

import (
	"net/netip"
	"time"

	"pilaster.io/pilaster/internal/network/nimitz/pipeline"
)

const (
	packetRate                    = 100_000 // a second, of a flow that sends: RoCE's are never few
	tenantA, tenantB pipeline.VNI = 7, 8
)

// subnet is the node CIDR of a tenant's node, a /29 as in §3.2.
func subnet(job byte, node int) netip.Prefix {
	return netip.PrefixFrom(netip.AddrFrom4([4]byte{job, byte(node >> 13), byte(node >> 5), byte(node << 3)}), 29)
}

// remote are the forwarding entries of a job's other nodes.
func remote(vni pipeline.VNI, job byte, nodes int) (all []pipeline.Entry) {
	for n := range nodes {
		all = append(all, pipeline.Forward{VNI: vni, To: subnet(job, n), Port: pipeline.VXLAN})
	}
	return all
}

// flow goes to the first container of a job's node.
func (t *Table) flow(vni pipeline.VNI, job byte, node, container int, bursts ...Burst) Flow {
	h, found := t.Lookup(vni, subnet(job, node).Addr().Next())
	if !found {
		panic("traffic to a node that the table does not have")
	}
	return Flow{Handle: h, Container: container, Packets: packetRate, Bursts: bursts}
}

// All is every megaflow of the table: what static offload pins.
func (t *Table) All() (all []Handle) {
	for h := range t.flows {
		all = append(all, Handle(h))
	}
	return all
}

func seconds(s float64) time.Duration { return time.Duration(s * float64(time.Second)) }
