package cli

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"net/netip"
	"slices"
	"strings"

	"connectrpc.com/connect"
	"github.com/spf13/cobra"

	pilasterv1 "pilaster.io/pilaster/api/pilaster/v1"
	"pilaster.io/pilaster/api/pilaster/v1/pilasterv1connect"
	"pilaster.io/pilaster/internal/lab"
	"pilaster.io/pilaster/internal/packet"
	"pilaster.io/pilaster/internal/service"
)

func newLabTrace(env Env, flags *labFlags) *cobra.Command {
	var own traceFlags
	c := &cobra.Command{
		Use:               "trace FROM TO [PROTOCOL[/PORT]]",
		ValidArgsFunction: flags.offer(2, cobra.ShellCompDirectiveNoFileComp, (*lab.Lab).PingTargets),
		Short:             "Show the way of a packet from one container to another, on both nodes",
		Long: `Show the way of a packet from one container to another, to a node, to a host outside or to an address, or
from a node to a container, as pilaster trace does on one node: the stages on both nodes, the table entry that
each hits, the addresses after each, and the time. If frontends look up the rules, it reads the tables of all
three nodes, and sends no packet. If the packet leaves the cluster by an egress gateway, it shows the gateway's
part too.
From a host outside to an external or load-balancer address of a service, or to a node for a node port, it begins at the
node to which the fabric routes the address, and sends the packet from the host.
An address of a container of the lab stands for the container. Of the way to any other address it shows the part on
the sender's node.
The exit status is 0 if the packet is delivered, leaves the cluster, or is sent to an address outside the lab, else 1.`,
		Example: "  pilaster lab trace b1 b3\n  pilaster lab trace b1 b3 tcp/80 --dry-run\n" +
			"  pilaster lab trace b1 b3 udp/53 --wait 10s -o json",
		Args: cobra.RangeArgs(2, 3),
		RunE: func(c *cobra.Command, args []string) error {
			l, err := flags.open()
			if err != nil {
				return err
			}
			way, err := wayOf(c.Context(), l, args)
			if err != nil {
				return err
			}
			job, err := newTraceJob(&own, append([]string{way.Source.String(), way.Destination.String()}, args[2:]...))
			if err != nil {
				return err
			}
			_, notAddress := netip.ParseAddr(args[1])
			if slices.Contains(l.OutsideNames(), args[0]) {
				err = job.fromOutside(c, l, way, args[0])
			} else {
				err = job.inLab(c, l, way, notAddress != nil)
			}
			if err != nil {
				return err
			}
			return job.run(c.Context(), env)
		},
	}
	own.bind(c, "; empty: the one to which the fabric routes the destination")
	return c
}

// wayOf returns the addresses of a trace in a lab. Their family is that of the protocol.
func wayOf(ctx context.Context, l *lab.Lab, args []string) (lab.Way, error) {
	all := func(netip.Addr) bool { return true }
	if _, err := l.Container(args[1]); err != nil && !slices.Contains(l.NodeNames(), args[0]) {
		if a, err := l.Address(args[1]); err == nil { // of a node, or of a host outside
			args = slices.Concat(args[:1], []string{a.String()}, args[2:])
		}
	}
	fits, other := all, ""
	if len(args) == 3 {
		switch strings.ToLower(args[2]) {
		case "icmp":
			fits, other = netip.Addr.Is4, "icmpv6"
		case "icmpv6":
			fits, other = netip.Addr.Is6, "icmp"
		}
	}
	way, err := l.WayTo(ctx, args[0], args[1], fits)
	if other != "" && errors.Is(err, lab.ErrFamily) {
		if by, err := l.WayTo(ctx, args[0], args[1], all); err == nil {
			return by, usage("%s and %s have the addresses %v and %v, of another family than %s; nothing was sent: "+
				"use %s", args[0], args[1], by.Source, by.Destination, args[2], other)
		}
	}
	return way, err
}

// inLab lets the job ask the agents of a lab: of both nodes, if the destination is a container. named says that it has
// a name in the lab.
func (j *traceJob) inLab(c *cobra.Command, l *lab.Lab, way lab.Way, named bool) error {
	agent := func(node string) pilasterv1connect.AgentServiceClient {
		socket := agentSocket{daemonSocket{path: l.AgentSocket(node), command: c}}
		return socket.client()
	}
	// policies use the app of the labels that a container has now
	appOf := func(of lab.ContainerStatus) (uint32, error) {
		key := &pilasterv1.GetEndpointRequest{Key: l.ContainerID(of.Name)}
		got, err := agent(of.Node).GetEndpoint(c.Context(), connect.NewRequest(key))
		if err != nil {
			return 0, fmt.Errorf("labels of %s on %s: %w", of.Name, of.Node, err)
		}
		return cmp.Or(got.Msg.Endpoint.GetAppNow(), got.Msg.Endpoint.GetApp()), nil
	}
	j.silent = func(ctx context.Context) string {
		return silentFrontends(ctx, l.Operator(), way.To.Tenant, way.From.Node, way.To.Node)
	}
	j.tenant, j.from, j.to, j.nodeWith = way.From.Tenant, way.From.Name, way.To.Name, l.NodeWith
	isNode, senderApp := way.From.Name == "", uint32(0)
	var err error
	if !isNode {
		if senderApp, err = appOf(way.From); err != nil {
			return err
		}
	}
	sender := traceNode{client: agent(way.From.Node)}
	j.frontend = func(prefix string) traceNode {
		return traceNode{client: agent(l.NodeWith(prefix)), peerApp: senderApp}
	}
	if way.To.Name == "" {
		j.nodes, j.nodeAt = []traceNode{sender}, j.frontend
		if !named {
			j.note = fmt.Sprintf("no container of lab %s has the address %v, so only the sender's node %s was traced",
				l.Name(), way.Destination, way.From.Node)
		}
		return nil
	}
	if sender.peerApp, err = appOf(way.To); err != nil {
		return err
	}
	j.whole, j.nodes = true, []traceNode{sender}
	if way.To.Node != way.From.Node {
		j.nodes = append(j.nodes, traceNode{client: agent(way.To.Node), peerApp: senderApp})
	}
	if !isNode && way.To.Tenant != way.From.Tenant {
		j.note = fmt.Sprintf("%s and %s are of two tenants, %s and %s, which no network connects", way.From.Name,
			way.To.Name, way.From.Tenant, way.To.Tenant)
	}
	return nil
}

// fromOutside lets the job ask the agents of a lab about a packet of a host outside: that of the ingress node, and the
// one of the endpoint's node.
func (j *traceJob) fromOutside(c *cobra.Command, l *lab.Lab, way lab.Way, host string) error {
	in := cmp.Or(j.traceFlags.ingress, way.From.Node)
	if in == "" {
		return fmt.Errorf("the fabric of lab %[1]s routes %[2]v to no node; nothing was sent: pilaster lab route "+
			"%[2]v NODE, or choose a node by --ingress, with --dry-run", l.Name(), way.Destination)
	}
	if !slices.Contains(l.NodeNames(), in) {
		return usage("--ingress %s: lab %s has no node with this name", in, l.Name())
	}
	if in != way.From.Node && !j.dryRun {
		return usage("--ingress %s: the fabric of lab %s routes %v to another node, so a packet does not come in by "+
			"it; nothing was sent: add --dry-run", in, l.Name(), way.Destination)
	}
	at := func(node string) traceNode {
		socket := agentSocket{daemonSocket{path: l.AgentSocket(node), command: c}}
		return traceNode{client: socket.client()}
	}
	j.from, j.nodeWith, j.nodes = host, l.NodeWith, []traceNode{at(in)}
	j.nodeAt = func(prefix string) traceNode { return at(l.NodeWith(prefix)) }
	j.exposedBy = func(ctx context.Context) string { return exposedBy(ctx, l.Operator(), j.ask) }
	if j.dryRun || j.wait != 0 {
		return nil
	}
	if j.ask.Port != 0 && j.ask.SourcePort == 0 {
		j.ask.SourcePort = probePort()
	}
	j.probeBy = func(ctx context.Context) (packet.ProbeAnswer, error) {
		return l.Probe(ctx, host, packet.Probe{
			Source: netip.AddrPortFrom(j.ask.Source, j.ask.SourcePort), Protocol: j.ask.Protocol,
			To: netip.AddrPortFrom(j.ask.Destination, j.ask.Port),
		})
	}
	return nil
}

// probePort returns the source port of a probe, by which it differs from other packets: kernels choose higher ones for
// connections.
func probePort() uint16 { return uint16(20_000 + rand.UintN(10_000)) }

// exposedBy names the service that has the destination as an exposed port, for a node that does not expose it, as a
// line for a note; empty if no orchestrator answers.
func exposedBy(ctx context.Context, of pilasterv1connect.OperatorServiceClient, ask whyView) string {
	protocol := service.Protocol(ask.Protocol).String()
	ports := func(v serviceView) bool {
		return slices.ContainsFunc(v.Ports, func(p servicePortView) bool {
			return p.NodePort != 0 && p.NodePort == ask.Port && p.Protocol == protocol
		})
	}
	all, err := of.ListServices(ctx, connect.NewRequest(&pilasterv1.ListServicesRequest{}))
	if err != nil {
		return "" // the trace is complete without it
	}
	for _, its := range all.Msg.Services {
		v, err := viewService(its.Service)
		if err != nil || !v.isAt(ask.Destination) && !ports(v) {
			continue
		}
		got, err := of.GetService(ctx, connect.NewRequest(&pilasterv1.GetServiceRequest{
			Tenant: v.Tenant, Name: v.called(),
		}))
		if err != nil {
			return ""
		}
		what := ask.Destination.String() + " is the address"
		if !v.isAt(ask.Destination) {
			what = fmt.Sprintf("%d/%s is a node port", ask.Port, protocol)
		}
		return fmt.Sprintf("%s of service %s of tenant %s, for packets to nodes that host the tenant: %s", what,
			v.called(), v.Tenant, cmp.Or(strings.Join(got.Msg.Nodes, ", "), "none does"))
	}
	return fmt.Sprintf("no service of the cluster has the address %v or the node port %d/%s", ask.Destination, ask.Port,
		protocol)
}
