package demo

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"slices"
	"strings"
	"time"

	"connectrpc.com/connect"

	pilasterv1 "pilaster.io/pilaster/api/pilaster/v1"
	"pilaster.io/pilaster/internal/humanize"
	"pilaster.io/pilaster/internal/lab"
)

// The service of the demo: red's web containers, one a node, behind one address.
const (
	serviceName    = "web"
	servicePort    = 80
	backendPort    = 8080
	serviceClient  = "r4"
	removedBackend = "r3"
)

// connectTime is the timeout of a connection under load; loadTime is how long the load lasts.
const (
	connectTime = 250 * time.Millisecond
	loadTime    = 1500 * time.Millisecond
)

// service gives three containers one address, and removes one of them under load.
func (p *proof) service(ctx context.Context) (err error) {
	ctx, cancel := context.WithTimeout(ctx, 4*waitTime)
	defer cancel()
	red := spec.Tenants[1].Name
	client := lab.Container{Name: serviceClient, Node: "n2", Tenant: red, Labels: map[string]string{"app": "client"}}
	if err := p.lab.AddContainer(ctx, client); err != nil {
		return err
	}
	defer func() { err = errors.Join(err, p.lab.RemoveContainer(context.WithoutCancel(ctx), serviceClient)) }()
	backends := []string{"r1", "r2", removedBackend}
	for _, name := range backends {
		stop, err := p.answer(name)
		if err != nil {
			return err
		}
		defer stop()
	}
	made, err := p.lab.Operator().CreateService(ctx, connect.NewRequest(&pilasterv1.CreateServiceRequest{
		Service: &pilasterv1.Service{
			Tenant: red, Name: serviceName, Selector: map[string]string{"app": "web"},
			Ports: []*pilasterv1.ServicePort{{Protocol: "TCP", Port: servicePort, Target: backendPort}},
		},
	}))
	if err != nil {
		return err
	}
	defer func() {
		_, failed := p.lab.Operator().DeleteService(context.WithoutCancel(ctx),
			connect.NewRequest(&pilasterv1.DeleteServiceRequest{Tenant: red, Name: serviceName}))
		err = errors.Join(err, failed)
	}()
	at, err := netip.ParseAddr(made.Msg.Service.Address)
	if err != nil {
		return err
	}
	to := netip.AddrPortFrom(at, servicePort)
	open, err := p.untilAll(ctx, to, backends)
	if err != nil {
		return err
	}
	for _, c := range open {
		defer c.Close()
	}
	load, err := p.loadWithRemoval(ctx, to)
	if err != nil {
		return err
	}
	lost := 0
	for _, name := range backends[:2] {
		if err := echoes(open[name]); err != nil {
			lost++
		}
	}
	p.check(lost == 0, "7: %d of 2 open connections to the other backends ended", lost)
	p.check(load.answered["r1"] > 0 && load.answered["r2"] > 0, "7: connections by backend: %v", load.answered)
	p.check(load.lastFailure < time.Second, "7: connections still failed %v after the removal", load.lastFailure)

	p.print("%-46s%v has %d backends on %d nodes", "7  A service of red", to, len(backends), len(spec.Nodes))
	var shares []string
	total := 0
	for _, name := range backends {
		shares = append(shares, fmt.Sprint(name, " ", humanize.Grouped(load.answered[name])))
		total += load.answered[name]
	}
	p.print("   %-43s%s connections: %s", serviceClient+" → "+serviceName, humanize.Grouped(total),
		strings.Join(shares, ", "))
	p.print("   %-43s%d new connections failed, none later than %d ms; of 2 open ones to others, %d ended",
		removedBackend+" removed under load", load.failed, load.lastFailure.Milliseconds(), lost)

	i := slices.IndexFunc(spec.Containers, func(c lab.Container) bool { return c.Name == removedBackend })
	return p.lab.AddContainer(ctx, spec.Containers[i])
}

// answer runs a server in a container that answers each connection with the container's name and then with what it
// receives.
func (p *proof) answer(container string) (stop func(), err error) {
	ns, err := p.lab.Namespace(container)
	if err != nil {
		return nil, err
	}
	defer ns.Close()
	var l net.Listener
	err = ns.Do(func() (err error) { l, err = net.Listen("tcp6", fmt.Sprintf("[::]:%d", backendPort)); return err })
	if err != nil {
		return nil, err
	}
	go func() {
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			go func() {
				defer c.Close()
				fmt.Fprint(c, container)
				io.Copy(c, c)
			}()
		}
	}()
	return func() { l.Close() }, nil
}

// connectTo connects the client to the service and returns the name of the backend.
func (p *proof) connectTo(to netip.AddrPort) (name string, c net.Conn, err error) {
	ns, err := p.lab.Namespace(serviceClient)
	if err != nil {
		return "", nil, err
	}
	defer ns.Close()
	d := net.Dialer{Timeout: connectTime}
	if err := ns.Do(func() (err error) { c, err = d.Dial("tcp6", to.String()); return err }); err != nil {
		return "", nil, err
	}
	c.SetDeadline(time.Now().Add(connectTime))
	b := make([]byte, len(removedBackend))
	if _, err := io.ReadFull(c, b); err != nil {
		c.Close()
		return "", nil, err
	}
	return string(b), c, nil
}

// untilAll connects until it has a connection to each backend, and returns these.
func (p *proof) untilAll(ctx context.Context, to netip.AddrPort, backends []string) (map[string]net.Conn, error) {
	ctx, cancel := context.WithTimeout(ctx, waitTime)
	defer cancel()
	open := map[string]net.Conn{}
	for len(open) < len(backends) {
		if ctx.Err() != nil {
			return open, fmt.Errorf("the service has connections to %d of %d backends: %w", len(open), len(backends),
				context.Cause(ctx))
		}
		name, c, err := p.connectTo(to)
		if err != nil {
			time.Sleep(pollTime) // the nodes do not have the service yet
			continue
		}
		if open[name] != nil {
			c.Close()
			continue
		}
		open[name] = c
	}
	return open, nil
}

// echoes reports whether an open connection still carries data.
func echoes(c net.Conn) error {
	c.SetDeadline(time.Now().Add(waitTime))
	if _, err := c.Write([]byte("still")); err != nil {
		return err
	}
	_, err := io.ReadFull(c, make([]byte, len("still")))
	return err
}

// serviceLoad is what a client saw of a service while a backend was removed.
type serviceLoad struct {
	answered    map[string]int
	failed      int
	lastFailure time.Duration // after the removal began
}

// loadWithRemoval connects to the service again and again, and removes a backend meanwhile.
func (p *proof) loadWithRemoval(ctx context.Context, to netip.AddrPort) (serviceLoad, error) {
	load := serviceLoad{answered: map[string]int{}}
	removed := make(chan error, 1)
	begun := time.Now()
	var removal time.Time
	for time.Since(begun) < loadTime {
		if removal.IsZero() && time.Since(begun) > loadTime/3 {
			removal = time.Now()
			go func() { removed <- p.lab.RemoveContainer(ctx, removedBackend) }()
		}
		tried := time.Now()
		name, c, err := p.connectTo(to)
		if err == nil {
			load.answered[name]++
			c.Close()
			continue
		}
		load.failed++
		if !removal.IsZero() {
			load.lastFailure = max(load.lastFailure, tried.Sub(removal)) // when the failing connection began
		}
	}
	return load, <-removed
}
