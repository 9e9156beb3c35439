package nic

import (
	"net/netip"
	"time"

	"pilaster.io/pilaster/internal/network/nimitz/pipeline"
)

const (
	packetRate                    = 100_000 // per second, of a flow while it sends: RoCE flows are always fast
	tenantA, tenantB pipeline.VNI = 7, 8
)

// subnet returns the node CIDR of a tenant's node, a /29 as in §3.2.
func subnet(job byte, node int) netip.Prefix {
	return netip.PrefixFrom(netip.AddrFrom4([4]byte{job, byte(node >> 13), byte(node >> 5), byte(node << 3)}), 29)
}

// remote returns the forwarding entries of a job's other nodes.
func remote(vni pipeline.VNI, job byte, nodes int) (all []pipeline.Entry) {
	for n := range nodes {
		all = append(all, pipeline.Forward{VNI: vni, To: subnet(job, n), Port: pipeline.VXLAN})
	}
	return all
}

// flow returns a flow to a container of a job's node.
func (t *Table) flow(vni pipeline.VNI, job byte, node, container int, bursts ...Burst) Flow {
	h, found := t.Lookup(vni, subnet(job, node).Addr().Next())
	if !found {
		panic("the table lacks the destination node")
	}
	return Flow{Handle: h, Container: container, Packets: packetRate, Bursts: bursts}
}

// All returns every megaflow of the table, for static offload.
func (t *Table) All() (all []Handle) {
	for h := range t.flows {
		all = append(all, Handle(h))
	}
	return all
}

func seconds(s float64) time.Duration { return time.Duration(s * float64(time.Second)) }
