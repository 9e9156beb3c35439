package trace

import (
	"cmp"
	"context"
	"fmt"
	"net/netip"
	"slices"

	pilasterv1 "pilaster.io/pilaster/api/pilaster/v1"
	"pilaster.io/pilaster/internal/address"
	"pilaster.io/pilaster/internal/agent"
	"pilaster.io/pilaster/internal/dpapi"
	"pilaster.io/pilaster/internal/dropreason"
	"pilaster.io/pilaster/internal/endpoint"
	"pilaster.io/pilaster/internal/network"
	"pilaster.io/pilaster/internal/network/nimitz/pipeline"
	"pilaster.io/pilaster/internal/policy"
	"pilaster.io/pilaster/internal/tenant"
)

// Config has the parts of a Tracer.
type Config struct {
	Core   *agent.Core
	Path   dpapi.Tracing
	Plan   address.Plan
	Prefix netip.Prefix // of this node
	Node   string       // its name
	// Pipelines are those of this node's networks that have one, by network.
	Pipelines map[string]Pipeline
	// Revision returns the revision of the store up to which this node has the policies.
	Revision func() int64
	// Located reads the tables of a network with identifiers; nil if this node has none.
	Located network.Located
}

// Pipeline is the pipeline of a network with the stages of network nimitz.
type Pipeline struct {
	Entries func(context.Context) ([]pipeline.Entry, error)
	Switch  string       // ebpf, ovs
	Pool    netip.Prefix // of the nodes' tunnel addresses, if the tunnels are over IPv4
}

// Tracer traces packets on this node. Its methods are safe for concurrent use.
type Tracer struct {
	Config
	following chan struct{} // full during a Follow
}

// New returns a tracer.
func New(c Config) *Tracer { return &Tracer{Config: c, following: make(chan struct{}, 1)} }

// Verdicts of a trace: what becomes of the packet on this node.
const (
	Delivered = "delivered" // to its container, or to this node's gateway
	Sent      = "sent"      // to another node
	Left      = "left"      // the cluster
	Dropped   = "dropped"
	Passed    = "passed" // to this node's own stack, because no program takes a packet of a host outside
)

// Way is what only other nodes know of the way of a packet, and what was asked for.
type Way struct {
	// Backend is the endpoint to trace to, if the destination is a service. Zero: the one that the packet gets, or if
	// the tables do not say so the first one.
	Backend netip.Addr
	// Ingress is the /64 of the node in whose tunnel a packet of a host outside comes to this node; zero: none.
	Ingress netip.Prefix
	Pre     *pilasterv1.PreActions // of the frontend from which the packet comes; nil if it does not
}

// run is one trace.
type run struct {
	*Tracer
	of       agent.Connection
	way      Way
	tables   dpapi.TableNames
	response *pilasterv1.TraceResponse
	src, dst netip.Addr // after the last step
}

// Trace returns this node's steps for the first packet of a connection, which need not exist. It sends nothing.
func (t *Tracer) Trace(ctx context.Context, of agent.Connection, way Way) (*pilasterv1.TraceResponse, error) {
	r := &run{
		Tracer: t, of: of, way: way, tables: t.Path.TableNames(),
		response: &pilasterv1.TraceResponse{Node: t.Node, Prefix: t.Prefix.String()},
		src:      of.Source, dst: of.Destination,
	}
	from, to := t.Core.Explain(of.Source), t.Core.Explain(of.Destination)
	exposed, isExposed, err := r.exposed(from)
	switch {
	case err != nil:
	case isExposed:
		err = r.atIngress(exposed)
	case way.Ingress.IsValid() && way.Ingress != t.Prefix && isContainer(to) && to.Endpoint != nil:
		err = r.fromIngress(to)
	case t.isNode(from.Plaintext) && isContainer(to):
		err = r.fromNode(from, to)
	case from.Plaintext.IsValid() && from.Endpoint != nil:
		err = r.netpilaSender(from, to)
	case from.Plaintext.IsValid() && t.isOutside(of.Destination):
		err = r.atGateway(from)
	case from.Plaintext.IsValid() && to.Plaintext.IsValid():
		err = r.netpilaReceiver(from, to)
	case t.isOutside(of.Source) && isContainer(to) && to.Endpoint != nil:
		r.fromOutside(to)
	case t.hasIdentifiers(from.Overlays) || t.hasIdentifiers(to.Overlays):
		err = r.identified(from, to)
	default:
		err = r.pipelined(ctx, from.Overlays, to.Overlays)
		if err == nil && len(r.response.Steps) == 0 && t.isOutside(of.Source) && r.mayBeExposed(of.Destination, to) {
			r.notExposed()
		}
	}
	return r.response, err
}

// hasIdentifiers reports whether an address is one of a network with identifiers.
func (t *Tracer) hasIdentifiers(all []agent.OverlayMatch) bool {
	return slices.ContainsFunc(all, func(o agent.OverlayMatch) bool {
		return t.Core.TenantNetworkHas(o.Tenant, tenant.Identifiers)
	})
}

// step adds a step after which the packet has the addresses src and dst.
func (r *run) step(stage, detail, entry string) *pilasterv1.TraceStep {
	s := &pilasterv1.TraceStep{
		Stage: stage, Detail: detail, Entry: entry, Source: r.src.String(), Destination: r.dst.String(),
	}
	r.response.Steps = append(r.response.Steps, s)
	r.passes(r.src, r.dst)
	return s
}

// passes records addresses that the packet has at a stage.
func (r *run) passes(src, dst netip.Addr) {
	for _, side := range []struct {
		all *[]string
		one netip.Addr
	}{{&r.response.Sources, src}, {&r.response.Destinations, dst}} {
		if text := side.one.String(); side.one.IsValid() && !slices.Contains(*side.all, text) {
			*side.all = append(*side.all, text)
		}
	}
}

// drop adds the step that drops the packet.
func (r *run) drop(stage string, why dropreason.Reason, detail, entry string) {
	r.step(stage, detail, entry).Drop = why.String()
	r.response.Verdict, r.response.Drop = Dropped, why.String()
}

// policies adds the decisions of the policies for some directions. It reports whether all allow the packet.
func (r *run) policies(directions ...policy.Direction) (allowed bool, err error) {
	reasons, err := r.Core.Why(r.of)
	if err != nil {
		return false, err
	}
	allowed = true
	for _, reason := range reasons {
		if !slices.Contains(directions, reason.Direction) || reason.Access != "" {
			continue
		}
		detail, entry := decision(reason)
		if !reason.Allowed {
			r.drop("policy", dropreason.PolicyDenied, detail, entry)
			return false, nil
		}
		r.step("policy", detail, entry)
	}
	return allowed, nil
}

// decision describes a verdict of the policies, and what decided.
func decision(r agent.Reason) (detail, because string) {
	verdict := "allowed"
	if !r.Allowed {
		verdict = "denied"
	}
	switch {
	case r.By != nil:
		because = r.By.String()
	case r.CrossTenant:
		because = "the ends belong to two tenants"
	case !r.HasPolicies:
		because = "tenant " + r.Tenant + " has no policies"
	case r.Allowed:
		because = "no policy selects it"
	default:
		because = "the packet path has no rules for it; see pilaster status"
	}
	if r.Audit != nil {
		because += "; without audit mode denied by " + r.Audit.String()
	}
	return fmt.Sprintf("%v %s", r.Direction, verdict), because
}

// end describes an end whose plaintext address is known.
func (r *run) end(seen netip.Addr, e agent.Explanation) *pilasterv1.TraceEnd {
	end := &pilasterv1.TraceEnd{Address: seen.String(), Tenant: e.Tenant}
	if e.Plaintext.IsValid() {
		end.Plaintext, end.App = e.Plaintext.String(), uint32(address.Split(e.Plaintext).App)
	}
	if e.App != nil {
		end.Labels = e.App.Labels
	}
	if e.Endpoint != nil {
		r.addEndpoint(end, *e.Endpoint)
	}
	return end
}

func (r *run) addEndpoint(end *pilasterv1.TraceEnd, e endpoint.Record) {
	end.EndpointId, end.Endpoint = uint32(e.ID), cmp.Or(e.Pod, e.ContainerID)
	end.Tenant, end.App, end.Labels = e.Tenant, uint32(cmp.Or(e.AppNow, e.App)), e.Labels
	end.Device = r.Path.DeviceName(uint32(e.Device.HostIfindex))
}
