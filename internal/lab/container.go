package lab

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"path/filepath"
	"slices"
	"strings"

	"connectrpc.com/connect"
	"github.com/containernetworking/cni/libcni"
	"github.com/vishvananda/netlink"

	pilasterv1 "pilaster.io/pilaster/api/pilaster/v1"
	"pilaster.io/pilaster/internal/netns"
	"pilaster.io/pilaster/internal/tenant"
)

const (
	cniPlugin  = "pilaster-cni"
	cniNetwork = "pilaster"
	cniVersion = "1.1.0"

	// Interface is the name of a container's device.
	Interface = "eth0"
)

// AddContainer creates a container's namespace and process, and runs CNI ADD. If a step fails, it removes what it has
// created.
func (l *Lab) AddContainer(ctx context.Context, c Container) error {
	ns, err := netns.Create(l.folder.netns(c.Name))
	if err != nil {
		return fmt.Errorf("container %s: %w", c.Name, err)
	}
	ns.Close()
	if err := l.attach(ctx, c); err != nil {
		return fmt.Errorf(
			"container %s: %w",
			c.Name,
			errors.Join(
				err,
				l.control.stop(context.WithoutCancel(ctx), containerProcess(c.Name), false),
				netns.Remove(l.folder.netns(c.Name)),
			),
		)
	}
	return nil
}

func (l *Lab) attach(ctx context.Context, c Container) error {
	_, err := l.control.start(ctx, Process{
		Name: containerProcess(c.Name), Netns: l.folder.netns(c.Name), Log: l.folder.log(c.Name),
		Argv: []string{l.state.Binary, "lab", "hold"},
	})
	if err != nil {
		return err
	}
	state := ContainerStatus{Container: c}
	if err := l.addTo(ctx, &state); err != nil {
		return err
	}
	return l.keep(state)
}

// addTo runs CNI ADD on the container's node and reads its new status.
func (l *Lab) addTo(ctx context.Context, c *ContainerStatus) error {
	plugin, network, err := l.cni(c.Container)
	if err != nil {
		return err
	}
	if _, err := plugin.AddNetworkList(ctx, network, l.cniRuntime(c.Container)); err != nil {
		return fmt.Errorf("CNI ADD: %w", err)
	}
	got, err := l.Agent(c.Node).
		GetEndpoint(ctx, connect.NewRequest(&pilasterv1.GetEndpointRequest{Key: l.ContainerID(c.Name)}))
	if err != nil {
		return fmt.Errorf("read its address from its agent: %w", err)
	}
	if err := c.merge(got.Msg.Endpoint); err != nil {
		return err
	}
	if !c.Address.IsValid() {
		return errors.New("the agent reports no address")
	}
	return nil
}

// RemoveContainer runs CNI DEL for a container, then ends its process and removes its namespace.
func (l *Lab) RemoveContainer(ctx context.Context, name string) error {
	c, err := l.Container(name)
	if err != nil {
		return err
	}
	plugin, network, err := l.cni(c.Container)
	if err != nil {
		return err
	}
	if err := plugin.DelNetworkList(ctx, network, l.cniRuntime(c.Container)); err != nil {
		return fmt.Errorf("container %s: CNI DEL: %w", name, err)
	}
	if err := l.control.stop(ctx, containerProcess(name), false); err != nil {
		return fmt.Errorf("container %s: %w", name, err)
	}
	if err := netns.Remove(l.folder.netns(name)); err != nil {
		return err
	}
	return l.forget(name)
}

func (l *Lab) keep(c ContainerStatus) error {
	return l.change(func(all []ContainerStatus) ([]ContainerStatus, error) { return append(all, c), nil })
}

func (l *Lab) forget(name string) error {
	return l.change(func(all []ContainerStatus) ([]ContainerStatus, error) {
		return slices.DeleteFunc(all, func(c ContainerStatus) bool { return c.Name == name }), nil
	})
}

// CheckContainer runs CNI CHECK for a container, against the result of its ADD.
func (l *Lab) CheckContainer(ctx context.Context, name string) error {
	c, err := l.Container(name)
	if err != nil {
		return err
	}
	plugin, network, err := l.cni(c.Container)
	if err != nil {
		return err
	}
	if err := plugin.CheckNetworkList(ctx, network, l.cniRuntime(c.Container)); err != nil {
		return fmt.Errorf("container %s: CNI CHECK: %w", name, err)
	}
	return nil
}

// Container returns a running container.
func (l *Lab) Container(name string) (ContainerStatus, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	for _, c := range l.state.Containers {
		if c.Name == name {
			return c, nil
		}
	}
	return ContainerStatus{}, fmt.Errorf("lab %s has no container %q; pilaster lab status lists them", l.Name(), name)
}

// Containers returns the containers in the order of the spec.
func (l *Lab) Containers() []ContainerStatus {
	l.mu.Lock()
	defer l.mu.Unlock()
	return slices.Clone(l.state.Containers)
}

// Clear reports whether a tenant's containers see plaintext addresses.
func (l *Lab) Clear(name string) bool { return l.tenant(name).Addressing == tenant.Clear }

func (l *Lab) tenant(name string) Tenant {
	for _, t := range l.state.Spec.Tenants {
		if t.Name == name {
			return t
		}
	}
	return Tenant{}
}

// ContainerID returns a container's ID for the CNI plugin and the agent.
func (l *Lab) ContainerID(name string) string { return l.Name() + "-" + name }

// CNIConfig returns the network configuration list of a container, as a runtime would read it.
func (l *Lab) CNIConfig(c Container) ([]byte, error) {
	labels, err := c.identity()
	if err != nil {
		return nil, err
	}
	ports, err := c.hostPorts()
	if err != nil {
		return nil, err
	}
	plugin := map[string]any{
		"type": cniPlugin, "tenant": c.Tenant, "labels": labels, "agentSocket": l.AgentSocket(c.Node),
	}
	if c.AddressKey != "" {
		plugin["addressKey"] = c.AddressKey
	}
	if len(ports) > 0 {
		plugin["capabilities"] = map[string]bool{"portMappings": true}
	}
	return json.MarshalIndent(map[string]any{
		"cniVersion": cniVersion, "name": cniNetwork, "plugins": []map[string]any{plugin},
	}, "", "  ")
}

func (l *Lab) cni(c Container) (*libcni.CNIConfig, *libcni.NetworkConfigList, error) {
	config, err := l.CNIConfig(c)
	if err != nil {
		return nil, nil, err
	}
	network, err := libcni.NetworkConfFromBytes(config)
	if err != nil {
		return nil, nil, err
	}
	return libcni.NewCNIConfigWithCacheDir(
		[]string{filepath.Dir(l.state.Binary)},
		l.folder.path("cni"),
		nil,
	), network, nil
}

// cniRuntime returns what a runtime passes with each call for a container.
func (l *Lab) cniRuntime(c Container) *libcni.RuntimeConf {
	with := &libcni.RuntimeConf{ContainerID: l.ContainerID(c.Name), NetNS: l.folder.netns(c.Name), IfName: Interface}
	ports, _ := c.hostPorts() // CNIConfig has checked them
	if len(ports) == 0 {
		return with
	}
	var mappings []map[string]any
	for _, p := range ports {
		m := map[string]any{"hostPort": p.Host, "containerPort": p.Container, "protocol": strings.ToLower(p.Protocol)}
		if p.Address.IsValid() {
			m["hostIP"] = p.Address.String()
		}
		mappings = append(mappings, m)
	}
	with.CapabilityArgs = map[string]any{"portMappings": mappings}
	return with
}

// OVSProcess returns the supervisor's name for a node's Open vSwitch.
func OVSProcess(node string) string { return "ovs-" + node }

// AgentProcess returns the supervisor's name for a node's agent.
func AgentProcess(node string) string { return "agent-" + node }

func containerProcess(name string) string { return "container-" + name }

// Gateway returns the MAC address of the container's static neighbour, its next hop for all traffic.
func (l *Lab) Gateway(container string) (net.HardwareAddr, error) {
	ns, err := l.Namespace(container)
	if err != nil {
		return nil, err
	}
	defer ns.Close()
	h, err := ns.Netlink()
	if err != nil {
		return nil, err
	}
	defer h.Close()
	neighbours, err := netns.List(func() ([]netlink.Neigh, error) { return h.NeighList(0, netlink.FAMILY_V6) })
	if err != nil {
		return nil, fmt.Errorf("neighbours of %s: %w", container, err)
	}
	for _, n := range neighbours {
		if n.State&netlink.NUD_PERMANENT != 0 && len(n.HardwareAddr) == 6 {
			return n.HardwareAddr, nil
		}
	}
	return nil, fmt.Errorf("%s has no static neighbour", container)
}
