package endpoint

// Kinds of device that join a container to the node, as Device.Kind has them.
const (
	Veth    = "veth"
	Macvlan = "macvlan"
	Netkit  = "netkit"
)
