package sharing

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"math/bits"
	"net/netip"

	"pilaster.io/pilaster/internal/address"
	"pilaster.io/pilaster/internal/bench/progrun"
	"pilaster.io/pilaster/internal/bench/report"
	"pilaster.io/pilaster/internal/datapath/bpfobj"
	"pilaster.io/pilaster/internal/dpapi"
	"pilaster.io/pilaster/internal/network/nimitz/pipeline"
	"pilaster.io/pilaster/internal/packet"
	"pilaster.io/pilaster/internal/policy"
)

const (
	lookupFrames = 1 << 14
	ethernet     = 14
	// noTenant has no policies.
	noTenant = vni + 1
	allowed  = 0 // result of the program that looks up rules
)

// lookups returns samples of the time of a lookup in ns: the rules of both ends, of random clients, as a frontend looks
// them up. The time of the same program for a tenant without policies is subtracted.
func (r *run) lookups(ctx context.Context) (all []float64, err error) {
	n := r.bed.nodes[frontend]
	hook, closeHook, err := progrun.NewHook("why", n.path.Objects.PilWhy, 0, nil)
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, closeHook()) }()
	var own, peer, none [][]byte
	for range lookupFrames {
		client, port := r.bed.clients[r.random.IntN(len(r.bed.clients))], uint16(1024+r.random.IntN(60_000))
		at := tuple{r.bed.server, client, serverApp, clientApp, serverPort, port}
		for to, t := range map[*[][]byte]struct {
			tuple
			tenant uint32
		}{&own: {at, vni}, &peer: {at.reversed(), vni}, &none: {at, noTenant}} {
			frame, err := binary.Append(make([]byte, ethernet), binary.NativeEndian, t.request(t.tenant))
			if err != nil {
				return nil, err
			}
			*to = append(*to, frame)
		}
	}
	if err := r.admits(n.path.LookupPolicy); err != nil {
		return nil, err
	}
	err = n.ns.Do(func() error {
		if err := pin(r.CPU); err != nil {
			return err
		}
		var each [3]*progrun.Frames
		for i, heads := range [][][]byte{own, peer, none} {
			f, err := progrun.NewHeads(hook, heads, len(heads[0])+32)
			if err != nil {
				return err
			}
			defer f.Close()
			each[i] = f
		}
		for i := range r.Rounds + 1 {
			var ns [3]float64
			for j, f := range each {
				if err := ctx.Err(); err != nil {
					return err
				}
				var err error
				if ns[j], err = f.Time(lookupFrames, allowed); err != nil {
					return err
				}
			}
			if i > 0 {
				all = append(all, ns[0]+ns[1]-2*ns[2])
			}
		}
		return nil
	})
	return all, err
}

// tuple is a session as one of its ends sees it.
type tuple struct {
	local, remote         netip.Addr
	localApp, remoteApp   uint32
	localPort, remotePort uint16
}

func (t tuple) reversed() tuple {
	return tuple{t.remote, t.local, t.remoteApp, t.localApp, t.remotePort, t.localPort}
}

func (t tuple) request(tenant uint32) bpfobj.PilasterWhyRequest {
	return bpfobj.PilasterWhyRequest{Tuple: bpfobj.PilasterFlowTuple{
		Local: bpfobj.ToAddr(t.local), Remote: bpfobj.ToAddr(t.remote), Tenant: tenant,
		LocalApp: t.localApp, RemoteApp: t.remoteApp, LocalPort: bits.ReverseBytes16(t.localPort),
		RemotePort: bits.ReverseBytes16(t.remotePort), Proto: policy.TCP,
	}}
}

// admits checks that the rules accept a connection, and so that all of them were looked up.
func (r *run) admits(lookup func(dpapi.PolicyQuery) (dpapi.PolicyVerdict, error)) error {
	client := r.bed.clients[len(r.bed.clients)-1]
	got, err := lookup(dpapi.PolicyQuery{
		Tenant: vni, Local: r.bed.server, Remote: client, LocalApp: serverApp, RemoteApp: clientApp,
		Protocol: policy.TCP, LocalPort: serverPort, RemotePort: 40_000,
	})
	if err == nil && (!got.Allowed[policy.Ingress] || got.Rules[policy.Ingress] == 0) {
		err = fmt.Errorf("the rules say %+v of a connection from %v, want that one of them accepts it", got, client)
	}
	return err
}

// Places of a message (struct offload_msg of the programs) and of its fields in a frame.
const (
	outerSource  = 14 + 8
	outerAddress = 16
	serviceIndex = 14 + 40 + 8 + 8 + 7
	messageAt    = serviceIndex + 1
	messageBytes = 88
	kindAt       = messageAt + 5
	sessionAt    = messageAt + 6
	innerAt      = messageAt + messageBytes
	toFrontend   = 255
	innerHeads   = 14 + 40 + 8
)

// message captures a frame of the frontend to the backend.
func (r *run) message(ctx context.Context) (_ []byte, err error) {
	c, err := packet.NewCapture(r.bed.nodes[backend].ns, "eth0", packet.IncomingOnly)
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, c.Close()) }()
	if _, err := r.bed.transactions(ctx, 1, r.CPU, r.random); err != nil {
		return nil, err
	}
	ctx, stop := context.WithTimeout(ctx, patience)
	defer stop()
	got, err := c.Until(ctx, func(c packet.Captured) bool {
		return len(c.Frame) > innerAt && binary.BigEndian.Uint16(c.Frame[56:58]) == pipeline.OffloadPort &&
			c.Frame[kindAt] == kindPre
	})
	if err != nil {
		return nil, fmt.Errorf("a message of the frontend: %w", err)
	}
	return got[len(got)-1].Frame, nil
}

// question makes of a frontend's message the backend's question about a packet of size bytes, of another session.
func question(message, mac []byte, t tuple, size int) []byte {
	frame := bytes.Clone(message[:innerAt+innerHeads])
	copy(frame, mac)
	source, destination := frame[outerSource:outerSource+outerAddress], frame[outerSource+outerAddress:]
	for i := range source {
		source[i], destination[i] = destination[i], source[i]
	}
	length := uint16(innerAt + size - 14 - 40)
	binary.BigEndian.PutUint16(frame[14+4:], length)
	binary.BigEndian.PutUint16(frame[14+40+4:], length)
	frame[serviceIndex], frame[kindAt] = toFrontend, kindAsk
	session := append([]byte{policy.TCP, 0}, t.local.AsSlice()...)
	session = append(session, t.remote.AsSlice()...)
	session = binary.BigEndian.AppendUint16(session, t.localPort)
	session = binary.BigEndian.AppendUint16(session, t.remotePort)
	copy(frame[sessionAt:], session)
	return frame
}

// measureAnswers measures how fast a frontend answers questions about packets, each of which needs a lookup.
func (r *run) measureAnswers(ctx context.Context) error {
	first, err := byBlocks("one", 1).compile()
	if err != nil {
		return err
	}
	if err := errors.Join(r.bed.setRules(first), r.bed.split(ctx, true)); err != nil {
		return err
	}
	message, err := r.message(ctx)
	if err != nil {
		return err
	}
	n := r.bed.nodes[frontend]
	ifindex, mac, err := r.bed.uplink(frontend)
	if err != nil {
		return err
	}
	hook, closeHook, err := progrun.NewHook("uplink-in", n.path.Objects.PilUplinkIn, ifindex, mac)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, closeHook()) }()
	for _, rules := range r.AnswerRules {
		tables, err := byBlocks("answers", rules).compile()
		if err != nil {
			return err
		}
		err = n.path.SetPolicies(dpapi.TenantPolicies{
			Tenant: tenantName, IDs: []address.TenantID{vni}, Tables: tables,
		})
		if err != nil {
			return err
		}
		for _, size := range r.AnswerBytes {
			var heads [][]byte
			for i := range lookupFrames {
				client := r.bed.clients[r.random.IntN(len(r.bed.clients))]
				t := tuple{r.bed.server, client, serverApp, clientApp, serverPort, uint16(1024 + i)}
				heads = append(heads, question(message, mac, t, size))
			}
			ns, err := r.answers(ctx, hook, heads, innerAt+size)
			if err != nil {
				return fmt.Errorf("%d rules, %d bytes: %w", rules, size, err)
			}
			r.report.Answers = append(r.report.Answers, Answer{
				Rules: rules, Bytes: size, Ns: report.Bootstrap(ns, r.random),
			})
		}
		r.step()
	}
	return nil
}

// answers returns samples of the time of an answer in ns. Before each question the rules' generation changes, so that
// no verdict is cached.
func (r *run) answers(ctx context.Context, h *progrun.Hook, heads [][]byte, size int) (all []float64, err error) {
	n := r.bed.nodes[frontend]
	err = n.ns.Do(func() error {
		if err := pin(r.CPU); err != nil {
			return err
		}
		f, err := progrun.NewHeads(h, heads, size, n.path.Objects.PolGenerationV1)
		if err != nil {
			return err
		}
		defer f.Close()
		before, err := n.sent(kindAnswer)
		if err != nil {
			return err
		}
		for i := range r.Rounds + 1 {
			if err := ctx.Err(); err != nil {
				return err
			}
			ns, err := f.Time(r.Answers, progrun.Forwarded)
			if err != nil {
				return err
			}
			if i > 0 {
				all = append(all, ns)
			}
		}
		after, err := n.sent(kindAnswer)
		if err == nil && after-before != f.Sent {
			err = fmt.Errorf("the frontend answered %d of %d questions", after-before, f.Sent)
		}
		return err
	})
	return all, err
}
