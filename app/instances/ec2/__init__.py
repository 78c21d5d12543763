"""The `ec2` provider: an instance is a machine of Amazon EC2."""

from app.instances.ec2.provider import Ec2Instances

__all__ = ["Ec2Instances"]
