package agent

import (
	"context"
	"fmt"
	"net/netip"

	"connectrpc.com/connect"

	pilasterv1 "pilaster.io/pilaster/api/pilaster/v1"
	"pilaster.io/pilaster/internal/address"
	"pilaster.io/pilaster/internal/endpoint"
	"pilaster.io/pilaster/internal/policy"
)

// Question is about a session that may not exist: one that either end begins.
type Question struct {
	Tenant              address.TenantID
	Local, Remote       netip.Addr    // canonical
	LocalApp, RemoteApp address.AppID // as the addresses say
	Protocol            uint8
	LocalPort           uint16
	RemotePort          uint16
}

// Answer is what the kernel's own tables say of it.
type Answer struct {
	LocalApp, RemoteApp address.AppID // as they are now
	Allowed             [2]bool       // by policy.Direction, seen from the local end
	Rules, Audits       [2]uint32     // that decided, and that would have denied; 0 where none did
}

// Reason is what this node's policies say of a connection at one of its ends.
type Reason struct {
	Direction policy.Direction
	Endpoint  endpoint.Record
	Peer      netip.Addr // canonical
	Policed   bool       // the tenant has policies at all
	Own, Far  address.AppID
	Allowed   bool
	By, Audit *policy.RuleName // what decided, and what would have denied if it were not in audit; nil where nothing did
}

// Why says of a connection that may not exist what becomes of it at those of its ends that are here: none, one or both.
func (c *Core) Why(source, destination netip.Addr, protocol uint8, port uint16) ([]Reason, error) {
	from, to := c.Explain(source), c.Explain(destination)
	if !from.Plaintext.IsValid() || !to.Plaintext.IsValid() {
		if len(from.Overlaid)+len(to.Overlaid) > 0 {
			return nil, refuse(ErrNever, "%v and %v: addresses of network nimitz say no identity, its packets do; what was dropped there, and by which rule, `pilaster monitor` and `pilaster policy hits` tell", source, destination)
		}
		return nil, nil
	}
	var all []Reason
	for _, direction := range [2]policy.Direction{policy.Egress, policy.Ingress} {
		own, far := from, to
		if direction == policy.Ingress {
			own, far = to, from
		}
		if own.Endpoint == nil {
			continue
		}
		r, err := c.why(direction, *own.Endpoint, own.Plaintext, far.Plaintext, protocol, port)
		if err != nil {
			return nil, err
		}
		all = append(all, r)
	}
	return all, nil
}

func (c *Core) why(direction policy.Direction, own endpoint.Record, local, remote netip.Addr, protocol uint8, port uint16) (Reason, error) {
	here, there := address.Split(local), address.Split(remote)
	q := Question{Tenant: here.Tenant, Local: local, Remote: remote, LocalApp: here.App, RemoteApp: there.App, Protocol: protocol}
	if direction == policy.Egress {
		q.RemotePort = port
	} else {
		q.LocalPort = port
	}
	answer, err := c.driver.Why(q)
	if err != nil {
		return Reason{}, err
	}
	r := Reason{Direction: direction, Endpoint: own, Peer: remote, Own: answer.LocalApp, Far: answer.RemoteApp, Allowed: answer.Allowed[direction]}
	r.Policed = c.policies.inSight()[own.Tenant].polices()
	r.By, r.Audit = c.ruleName(own.Tenant, answer.Rules[direction]), c.ruleName(own.Tenant, answer.Audits[direction])
	return r, nil
}

func (s *Service) Why(_ context.Context, req *connect.Request[pilasterv1.WhyRequest]) (*connect.Response[pilasterv1.WhyResponse], error) {
	core, err := s.ready()
	if err != nil {
		return nil, err
	}
	var ends [2]netip.Addr
	for i, text := range []string{req.Msg.Source, req.Msg.Destination} {
		if ends[i], err = address.ParseAny(text); err != nil {
			return nil, connect.NewError(connect.CodeInvalidArgument, err)
		}
	}
	if req.Msg.Protocol > 255 || req.Msg.Port > 65535 {
		return nil, connect.NewError(connect.CodeInvalidArgument, fmt.Errorf("protocol %d, port %d: there is no such", req.Msg.Protocol, req.Msg.Port))
	}
	reasons, err := core.Why(ends[0], ends[1], uint8(req.Msg.Protocol), uint16(req.Msg.Port))
	if err != nil {
		return nil, toConnect(err)
	}
	resp := &pilasterv1.WhyResponse{}
	for _, r := range reasons {
		m := &pilasterv1.Reason{Direction: r.Direction.String(), Endpoint: endpointToProto(r.Endpoint), Peer: r.Peer.String(), Policed: r.Policed,
			App: uint32(r.Own), PeerApp: uint32(r.Far), Allowed: r.Allowed, Rule: ruleToProto(r.By), Audit: ruleToProto(r.Audit)}
		resp.Reasons = append(resp.Reasons, m)
	}
	return connect.NewResponse(resp), nil
}

func ruleToProto(n *policy.RuleName) *pilasterv1.RuleName {
	if n == nil {
		return nil
	}
	return &pilasterv1.RuleName{Policy: n.Policy, Rule: n.String(), Audit: n.Audit}
}
