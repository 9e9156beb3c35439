package tenant

// CheckRackName refuses names that are not a DNS label.
func CheckRackName(name string) error { return checkName("rack", name) }

// CheckZoneName refuses names that are not a DNS label.
func CheckZoneName(name string) error { return checkName("zone", name) }
