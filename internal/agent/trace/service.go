package trace

import (
	"fmt"
	"net/netip"
	"slices"

	pilasterv1 "pilaster.io/pilaster/api/pilaster/v1"
	"pilaster.io/pilaster/internal/address"
	"pilaster.io/pilaster/internal/agent/refusal"
	"pilaster.io/pilaster/internal/dpapi"
	"pilaster.io/pilaster/internal/dropreason"
)

// listedBackends is the most backends of a service that a response lists.
const listedBackends = 10

// toService adds the stages of the program service_out. The packet path picks a backend; the trace goes on to the one
// that was asked for, or else to the first. It returns false if the destination is no service.
func (r *run) toService(source dpapi.SourceEntry) (is bool, err error) {
	const stage = "service"
	s, is, err := r.Core.Service(source.TenantID, r.of)
	if err != nil || !is {
		return is, err
	}
	port := netip.AddrPortFrom(r.of.Destination, r.of.Port)
	if s.Drop != 0 {
		entry := ""
		switch {
		case s.Drop == dropreason.NoBackend:
			entry = fmt.Sprintf("%s: %v", r.tables.Services, port)
		case s.Address.IsValid():
			entry = fmt.Sprintf("no %v in %s", port, r.tables.Services)
		}
		r.drop(stage, s.Drop, s.Because, entry)
		return true, nil
	}
	all := slices.Concat(s.Backends, s.Draining) // connections that exist may have a draining one
	i := slices.IndexFunc(all, func(b dpapi.Backend) bool {
		return !r.way.Backend.IsValid() || b.Seen == r.way.Backend || b.Plain == r.way.Backend
	})
	if i < 0 {
		return true, refusal.New(refusal.ErrInvalid, "%v is no endpoint of the service for clients on this node: "+
			"choose one that pilaster service describe shows as ready, or none", r.way.Backend)
	}
	to := all[i]
	all = slices.Concat([]dpapi.Backend{to}, all[:i], all[i+1:])
	for _, b := range all[:min(len(all), listedBackends)] {
		r.response.Backends = append(r.response.Backends, &pilasterv1.TraceBackend{
			Address: b.Seen.String(), Plaintext: b.Plain.String(), Port: uint32(b.Port),
		})
	}
	r.dst, r.of.Destination, r.of.Port = to.Seen, to.Plain, to.Port
	r.response.Destination = r.end(to.Seen, r.Core.Explain(to.Plain))
	itself := to.Seen == r.src
	if itself {
		r.src = netip.PrefixFrom(port.Addr(), address.NodeBits).Masked().Addr() // so that its answer comes back
	}
	r.step(stage, fmt.Sprintf("%s; this way leads to %v", s.Because, netip.AddrPortFrom(to.Seen, to.Port)),
		fmt.Sprintf("%s: %v", r.tables.Services, port))
	switch node := address.Split(to.Plain).Node; {
	case itself:
		r.deliver(source.Endpoint, source.Device, r.tables.Sources)
	case node == r.Prefix:
		err = r.deliverHere(to.Plain)
	default:
		r.src, r.dst = source.Plaintext, to.Plain
		r.step("translate", "the entry of the endpoint has its address on the fabric", r.tables.Backends)
		err = r.leave(node)
	}
	return true, err
}
